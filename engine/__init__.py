"""The processes of the engine and their pure cores."""
