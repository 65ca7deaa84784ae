"""autoscaler: replica counts on Kubernetes."""
