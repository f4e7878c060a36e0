"""The control plane: jobs, their store, the scheduler, the planner and the one seam to Ray."""
