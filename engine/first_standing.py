"""How things stand with an engine that has just started, by its configuration. Pure."""

from tercet.engine.adapter_names import read_adapters
from tercet.engine.config import EngineConfig
from tercet.ipc.process_messages import LoadedAdapter, Standing


def first_standing(config: EngineConfig) -> Standing:
    """Its adapters are in the first places, loaded in the order given."""
    adapters = [LoadedAdapter(name, index, index) for index, name in enumerate(read_adapters(config.adapter))]
    return Standing(config.model, adapters=tuple(adapters))
