"""What runs on the cluster: the job controller, the worker actors, the training loop, data and models."""
