"""Runs that are submitted to a standing release of the chart on Kubernetes."""
