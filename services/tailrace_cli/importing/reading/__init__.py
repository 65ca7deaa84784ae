"""Configurations as other systems keep them: YAML files, command lines, scripts."""
