"""EngineConfig names the flag, what came and what is wanted."""

import msgspec
import pytest

from tercet.engine.adapter_names import read_adapters
from tercet.engine.config import EngineConfig
from tercet.engine.speculation import SpeculativeConfig


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "tpu"}, ["--device", "'tpu'", "cpu"]),
        ({"dtype": "int3"}, ["--dtype", "'int3'", "bfloat16"]),
        ({"page_size": 48}, ["--page-size", "48", "64"]),
        ({"tensor_parallel_size": 0}, ["--tensor-parallel-size", "0"]),
        ({"data_parallel_size": 0}, ["--data-parallel-size", "0", "1 to 64"]),
        ({"data_parallel_size": -1}, ["--data-parallel-size", "-1"]),
        ({"data_parallel_size": 65}, ["--data-parallel-size", "65"]),
        ({"data_parallel_size": "2"}, ["--data-parallel-size", "'2'"]),
        ({"max_num_seqs": -1}, ["--max-num-seqs", "-1"]),
        ({"max_num_seqs": 4097, "max_num_batched_tokens": 8192}, ["--max-num-seqs", "4097", "4096"]),
        ({"max_model_len": 1}, ["--max-model-len", "1"]),
        ({"gpu_memory_utilization": float("nan")}, ["--gpu-memory-utilization", "nan"]),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, ["--max-num-batched-tokens", "32", "64"]),
        ({"kept_states": 65537}, ["--kept-states", "65537", "65536"]),
        ({"null_step_ms": 5.0}, ["--null-step-ms", "5.0", "--load-format null"]),
        ({"kv_cache_memory": "8GiB"}, ["--kv-cache-memory", "'8GiB'", "int | null"]),
        ({"kv_offloading_size": 0}, ["--kv-offloading-size", "0"]),
        ({"kv_offloading_size": "64GiB"}, ["--kv-offloading-size", "'64GiB'", "int | null"]),
        (
            {"kv_offloading_size": 2**30, "enable_prefix_caching": False},
            ["--kv-offloading-size", "--no-enable-prefix-caching"],
        ),
        ({"max_num_seqs": 64.0}, ["--max-num-seqs", "64.0", "int"]),
        ({"trace_dir": "/tmp/\udcff"}, ["--trace-dir", r"'/tmp/\udcff'", "want UTF-8"]),
        ({"deterministic": "no"}, ["--deterministic", "'no'", "bool"]),
        ({"listen": ("http://x",)}, ["--listen", "http://x", "ipc://"]),
        ({"adapter": ("sql",)}, ["--adapter", "'sql'", "NAME=FOLDER"]),
        ({"adapter": ("=folder",)}, ["--adapter", "'=folder'", "NAME=FOLDER"]),
        ({"adapter": ("sql=",)}, ["--adapter", "'sql='", "NAME=FOLDER"]),
        ({"adapter": ("sql=a", "sql=b")}, ["--adapter", "'sql' twice", "'b'"]),
        ({"adapter": ("m=a",)}, ["--adapter", "'m'", "the model's"]),
        ({"adapter": ("tiny=a",), "served_model_name": "tiny"}, ["--adapter", "'tiny'", "the model's"]),
        ({"adapter": "sql=a"}, ["--adapter", "'sql=a'", "array"]),
        ({"listen": ("ipc://a", "ipc://b", "ipc://a")}, ["--listen", "ipc://a", "more than once"]),
        ({"listen": ("tcp://[::1]:5",), "http": "[::1]:5"}, ["--http", "[::1]:5", "where --listen is", "another port"]),
        ({"speculative_config": 3}, ["--speculative-config", "3", "num_speculative_tokens"]),
        ({"speculative_config": {"num_speculative_tokens": 99}}, ["--speculative-config", "99", "1 to 15"]),
    ],
)
def test_wrong_values_name_flag_value_and_want(options: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        EngineConfig(model="m", **options)  # type: ignore[arg-type]
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["api_key", "listen_key"])
def test_a_key_of_the_wrong_type_is_not_shown(name: str) -> None:
    with pytest.raises(ValueError, match=rf"--{name.replace('_', '-')} got \w+; Expected") as caught:
        EngineConfig(model="m", **{name: "open sesame" if name == "api_key" else b"open sesame"})  # type: ignore[arg-type]
    assert "sesame" not in str(caught.value)


def test_adapters_have_names_and_folders_in_their_order() -> None:
    """The model's own name is free, where it is served under another."""
    given = ("sql=/adapters/a=b", "m=owner/name")
    config = EngineConfig(model="m", served_model_name="tiny", adapter=given)
    assert list(read_adapters(config.adapter).items()) == [("sql", "/adapters/a=b"), ("m", "owner/name")]


def test_config_survives_the_pipe_to_a_child() -> None:
    tries = {"method": "ngram", "num_speculative_tokens": 3}
    config = EngineConfig(
        model="m",
        listen=("ipc:///tmp/x",),
        adapter=("a=b",),
        kv_cache_memory=2**33,
        deterministic=True,
        speculative_config=tries,
    )  # type: ignore[arg-type]
    assert config.speculative_config == SpeculativeConfig(num_speculative_tokens=3)
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config
