"""The REST routes, one module for each thing they are about. They translate; the control plane decides."""
