"""What the services and their users share; each module and package says what it owns."""
