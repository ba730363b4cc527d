"""How a client's bytes become a request on the front desk, or a refusal. The only place that reads foreign bytes.

Pure: no socket. Preparing a request takes time and may be done in another thread; everything else is quick.
"""

import gc
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version

import msgspec

from tercet.engine.answer_formats import answer_formats
from tercet.engine.chat_template import TemplateRefused
from tercet.engine.config import EngineConfig
from tercet.engine.embedding import check_made
from tercet.engine.first_standing import first_standing
from tercet.engine.front_desk import FrontDesk
from tercet.engine.given_up import KILLS_WORKERS
from tercet.engine.grammar_trial import GrammarTrial
from tercet.engine.image_desk import ImageDesk
from tercet.engine.image_rules import ImageRules
from tercet.engine.live import Client, Live
from tercet.engine.loads import all_together, gauges
from tercet.engine.part_count import MAX_PARTS, has_too_many_bytes, has_too_many_parts
from tercet.engine.preparation import Prepared, prepare
from tercet.engine.prompt_check import check_depth, check_prompt
from tercet.engine.quick_requests import is_quick
from tercet.engine.refusal import RETRY_AFTER_S, TAKES_NO_MORE, Refusal
from tercet.engine.request_check import (
    MAX_NAME_LENGTH,
    Rules,
    check_handling,
    check_length,
    check_params,
    check_prompt_ids,
    check_text_length,
    goes_on,
    received_of,
    sampling_of,
    unpack_ids,
)
from tercet.engine.text_codec import TextCodec, TextRefused
from tercet.engine.truncation import check_truncation, cut_ids, keeps_end, most_tokens, readable, shortened
from tercet.ipc.answers import Detokenized, EngineInfo, Failed, Rejected, Tokenized
from tercet.ipc.change_messages import Change
from tercet.ipc.images_in import images_in
from tercet.ipc.messages import (
    Chat,
    Classify,
    ClassifyIds,
    Detokenize,
    Embed,
    EmbedIds,
    FromClient,
    Generate,
    GenerateIds,
    Question,
    Request,
    Tokenize,
)
from tercet.ipc.process_messages import Limits, LoadedAdapter
from tercet.ipc.sockets import MAX_PLAIN_BYTES
from tercet.ipc.step_messages import Submit

MAX_LIVE_REQUESTS = 65_536
"""More than these are refused: each keeps its prompt in memory while it waits."""


class Reception:
    """Admits requests to the desk."""

    def __init__(
        self,
        desk: FrontDesk,
        codec: TextCodec,
        rules: Rules,
        config: EngineConfig,
        image_rules: ImageRules | None = None,
    ) -> None:
        """`image_rules`: None where the model sees nothing."""
        self._desk = desk
        self._codec = codec
        self._rules = rules
        self._decoder: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
        self._name, self._version = config.served_model_name or config.model, version("tercet")
        self._formats = answer_formats(codec.template, config)
        self._trial = GrammarTrial()
        self._images = ImageDesk(image_rules, config)
        self.standing = first_standing(config)
        self.draining = False

    def measure_by(self, limits: Limits) -> None:
        """From now on; what was submitted stays as it is."""
        self._rules = replace(self._rules, limits=limits)

    def name_adapters(self, adapters: Mapping[str, LoadedAdapter]) -> None:
        """That requests may name from now on."""
        self._rules = replace(self._rules, adapters=adapters)

    def info(self) -> EngineInfo:
        """Who is there."""
        limits, loads = self._rules.limits, self._desk.loads
        whole = all_together(loads)
        return EngineInfo(
            self._name,
            self._version,
            limits.max_model_len,
            limits.vocab_size,
            whole.num_running,
            whole.num_waiting,
            whole.num_free_pages,
            whole.num_pages,
            whole.num_steps,
            whole.num_preemptions,
            whole.num_prefix_queries,
            whole.num_prefix_hits,
            *self._formats,
            self._rules.eos_ids,
            whole.num_trials,
            whole.num_guesses,
            whole.num_right_guesses,
            tuple(self._rules.adapters),
            limits.classifier,
            tuple(map(gauges, loads)) if len(loads) > 1 else (),
            whole.num_host_pages,
            whole.num_host_hits,
            whole.num_stored_bytes,
            whole.num_loaded_bytes,
            self.standing.weights,
            self.standing.is_asleep,
        )

    def decode(self, frames: Sequence[bytes]) -> FromClient | Rejected:
        """Whatever came, there is an answer to it."""
        if len(frames) != 1:
            return Rejected(
                None, "bad_message", f"a message of {len(frames)} frames came; want 1 frame, as from a DEALER"
            )
        if has_too_many_parts(frames[0]):
            text = f"tools, calls and params have more than {MAX_PARTS} lists and maps; want at most those"
            return Rejected(_request_id_in(frames[0]), "bad_message", text)
        if has_too_many_bytes(frames[0]):
            text = f"the message has more than {MAX_PLAIN_BYTES} bytes besides images; want at most those"
            return Rejected(_request_id_in(frames[0]), "bad_message", text)
        gc.disable()  # of millions of parts it would look through those made so far again and again, and find nothing
        try:
            message = self._decoder.decode(frames[0])
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            return Rejected(_request_id_in(frames[0]), "bad_message", f"the message cannot be read: {error}")
        finally:
            gc.enable()
        if isinstance(message, Question | Change) and not 1 <= len(message.request_id) <= MAX_NAME_LENGTH:
            return _bad_name(message.request_id)
        return message

    def admit(self, client: Client, request: Request, asleep: str | None = None) -> Live | Failed | Rejected:
        """Take the request's name and check all that does not need its token ids. `asleep`: why newcomers come in
        vain."""
        request_id = request.request_id
        if not 1 <= len(request_id) <= MAX_NAME_LENGTH:
            return _bad_name(request_id)
        if self.draining:
            return Failed(request_id, "draining", TAKES_NO_MORE, RETRY_AFTER_S)
        if self._desk.num_live >= MAX_LIVE_REQUESTS:
            text = f"{MAX_LIVE_REQUESTS} requests wait or run already; ask again when some have ended"
            return Failed(request_id, "overloaded", text, RETRY_AFTER_S)
        live = self._desk.open(client, request_id)
        if live is None:
            return Rejected(
                request_id, "duplicate_request_id", f"request {request_id!r} of this connection has not ended yet"
            )
        try:
            check_handling(request)
            check_params(request.params, self._rules)
            check_made(request, self._rules)
            check_truncation(request, self._rules)
            check_prompt(request, self._rules, has_template=self._codec.template is not None)
            self._images.check(request)
            received = received_of(request)
            if asleep is not None and not goes_on(received, request.params.n):
                raise Refusal("asleep", asleep)
            self._desk.split(live, list(received))
        except Refusal as refusal:
            return self._desk.fail(live, refusal.code, str(refusal))
        return live

    def is_quick(self, request: Request | Question) -> bool:
        """Whether `prepare` or `answer` may be called in the event loop."""
        return is_quick(request)

    def prepare(self, live: Live, request: Request) -> Prepared:
        """What has to be known to submit it; its grammar is compiled for a try. Thread-safe. Raises `Refusal`."""
        if request.params.structured is not None:
            self._trial.check(request.params.structured)
        prompt_ids, check = self._prompt_ids(request), partial(check_length, rules=self._rules)
        placed = self._images.place(prompt_ids, images_in(request), request.cache_salt, check)
        return prepare(request, placed, live.number, self._codec.pieces, self._rules)

    def _prompt_ids(self, request: Request) -> Sequence[int]:
        """Cut, if that is asked for."""
        codec, most = self._codec, most_tokens(request, self._rules)
        check, files = partial(check_text_length, rules=self._rules), images_in(request)
        try:
            match request:
                case Generate(prompt=prompt, cache_salt=salt):
                    if most is not None:
                        prompt = readable(prompt, self._rules, keeps_end=True)
                    return cut_ids(codec.encode(self._images.written(prompt, files), salt), most, keeps_end=True)
                case Chat(messages=messages, options=options, cache_salt=salt):
                    check_depth(request)
                    finish = partial(self._images.written, files=files)
                    return cut_ids(codec.encode_chat(messages, options, check, salt, finish), most, keeps_end=True)
                case Embed(prompt=prompt, cache_salt=salt):
                    return self._shortened(prompt, most, partial(codec.encode, salt=salt))
                case Classify(prompt=prompt, pair=pair, cache_salt=salt):
                    if pair is None:
                        return self._shortened(prompt, most, partial(codec.encode, salt=salt))
                    if most is None:
                        return codec.encode_pair(prompt, pair, check, salt)
                    return self._shortened(pair, most, partial(codec.encode_pair, prompt, salt=salt))
                case GenerateIds() | EmbedIds() | ClassifyIds():
                    return cut_ids(unpack_ids(request.prompt_ids), most, keeps_end=keeps_end(request))
        except (TemplateRefused, TextRefused) as error:
            raise Refusal("invalid_request", str(error)) from None

    def _shortened(self, text: str, most: int | None, encode: Callable[[str], "array[int]"]) -> Sequence[int]:
        if most is None:
            return encode(text)
        return shortened(readable(text, self._rules, keeps_end=False), most, encode, self._codec.token_ends)

    def answer(self, question: Question) -> Tokenized | Detokenized | Failed:
        """What the tokenizer makes of a text or of token ids; no request comes of it. Thread-safe."""
        request_id = question.request_id
        try:
            match question:
                case Tokenize(request=request):
                    check_prompt(request, self._rules, has_template=self._codec.template is not None)
                    self._images.check(request)
                    prompt_ids, check = self._prompt_ids(request), partial(check_length, rules=self._rules)
                    told_ids = self._images.tell(prompt_ids, images_in(request), request.cache_salt, check)
                    return Tokenized(request_id, array("i", told_ids).tobytes())
                case Detokenize(token_ids=packed):
                    token_ids = unpack_ids(packed, "tokens")
                    check_prompt_ids(token_ids, self._rules, "tokens")
                    if self._codec.tokenizer is None:
                        raise Refusal("invalid_request", "this checkpoint has no tokenizer: token ids have no text")
                    text = self._codec.tokenizer.decode(list(token_ids), skip_special_tokens=False)
                    return Detokenized(request_id, text)
        except Refusal as refusal:
            return Failed(request_id, refusal.code, str(refusal))

    def submit(self, live: Live, request: Request, prepared: Prepared, now: float) -> Submit:
        """What a scheduler gets. Raises `Refusal`."""
        handling, again = request.handling, goes_on(prepared.received, request.params.n)
        for answer in live.asked.answers:
            submit = Submit(
                answer.number,
                prepared.prompt_ids,
                sampling_of(prepared.sampling, answer.index),
                request.cache_salt,
                generated_ids=prepared.received[answer.index],
                again=again,
                priority=handling.priority,
                queue_timeout=None if again else handling.queue_timeout,
                images=prepared.images,
            )
            self._desk.submit(answer, submit, request.params, prepared.detokenizers[answer.index])
        live.asked.untold_prompt = prepared.told_ids if handling.return_prompt_ids else None
        self._desk.outstanding.hold(live.asked, sum(len(one.pixels) for one in prepared.images), is_known=again)
        whole = live.asked.submit(now)
        if (given_up := self._desk.given_up.refusal(whole, now)) is not None:
            raise Refusal(KILLS_WORKERS, given_up)
        return whole


def _bad_name(request_id: str) -> Rejected:
    return Rejected(
        request_id[:MAX_NAME_LENGTH],
        "bad_request_id",
        f"request_id has {len(request_id)} characters; want 1 to {MAX_NAME_LENGTH}",
    )


def _request_id_in(message: bytes) -> str | None:
    """The request id of a message that is wrong elsewhere, so that its sender knows which one was meant."""
    try:
        fields = msgspec.msgpack.decode(message, type=list[msgspec.Raw])
        return msgspec.msgpack.decode(fields[1], type=str)[:MAX_NAME_LENGTH] if len(fields) > 1 else None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
