"""How an engine is driven, whatever the engine and the transport."""
