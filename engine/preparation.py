"""All that takes time before a request can be submitted and needs its token ids: checks, and the text it goes on from.

Pure, and of no thread: of a long request an event loop lets others do this.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs

from tercet.engine.detokenizer import Detokenizer
from tercet.engine.embedding import resolve_made
from tercet.engine.image_desk import Placed
from tercet.engine.pieces import Pieces
from tercet.engine.refusal import Refusal
from tercet.engine.request_check import (
    Rules,
    adapter_named,
    check_prompt_ids,
    check_received_ids,
    received_of,
    resolve,
    stop_strings,
    unpack_ids,
)
from tercet.ipc.images import PlacedImage
from tercet.ipc.messages import (
    ClassifyRequest,
    EmbedRequest,
    Request,
    SamplingParams,
)
from tercet.ipc.step_messages import Sampling


@dataclass(frozen=True)
class Prepared:
    """A request that nothing is wrong with."""

    prompt_ids: bytes
    sampling: Sampling
    """Of its first answer."""
    received: dict[int, bytes]
    """By index of each answer that has not ended."""
    detokenizers: dict[int, Detokenizer]
    """By index too. They have made the text of what was received."""
    told_ids: bytes
    """The prompt as its client knows it."""
    images: tuple[PlacedImage, ...]


def prepare(
    request: Request, prompt: Placed | Sequence[int], number: int, pieces: Pieces | None, rules: Rules
) -> Prepared:
    """For a request of this number whose parameters are checked; a prompt without images may be its token ids. Raises
    `Refusal`."""
    prompt = prompt if isinstance(prompt, Placed) else Placed(prompt, prompt, ())
    prompt_ids = prompt.told_ids
    check_prompt_ids(prompt_ids, rules)
    sampling = resolve(request.params, len(prompt_ids), number, rules)
    if isinstance(request, EmbedRequest | ClassifyRequest):
        params = request.embedding if isinstance(request, EmbedRequest) else request.classification
        made, (place, load) = resolve_made(params, rules), adapter_named(params.adapter, rules)
        sampling = structs.replace(sampling, embedding=made, adapter=place, adapter_load=load)
    received = received_of(request)
    unpacked = {index: unpack_ids(ids, "received_ids") for index, ids in received.items()}
    for token_ids in unpacked.values():
        check_received_ids(token_ids, sampling.max_tokens, rules)
    detokenizers = {}
    generating = structs.replace(request.params, stop=stop_strings(request.params, rules.defaults.stop_strings))
    for index, token_ids in unpacked.items():
        detokenizers[index] = make_detokenizer(pieces, generating, token_ids, prompt_ids)
        if detokenizers[index].stop_hit is not None:
            raise Refusal("invalid_request", "received_ids holds a stop string; want ids of an answer in the making")
    told_ids = array("i", prompt_ids).tobytes()
    packed = array("i", prompt.prompt_ids).tobytes() if prompt.images else told_ids
    return Prepared(packed, sampling, received, detokenizers, told_ids, prompt.images)


def make_detokenizer(
    pieces: Pieces | None, params: SamplingParams, received_ids: Sequence[int] = (), prompt_ids: Sequence[int] = ()
) -> Detokenizer:
    """For an answer that goes on after its prompt, and what its client has received, which makes no text again."""
    detokenizer = Detokenizer(
        pieces if params.detokenize else None,
        stop_strings(params),
        include_stop=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        min_tokens=params.min_tokens,
        prompt_ids=prompt_ids,
    )
    for token_id in received_ids:
        detokenizer.push(token_id)
        if detokenizer.stop_hit is not None:
            break
    return detokenizer
