"""The processes of the tools benchmark."""
