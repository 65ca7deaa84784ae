"""Which versions are held and which offers are repetitions; knows neither bytes nor bus."""
