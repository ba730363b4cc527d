"""Which images a client's message brings, wherever in it they are. It knows no file."""

from tercet.ipc.messages import Chat, FromClient, Generate, Tokenize


def images_in(message: FromClient) -> tuple[bytes, ...]:
    """Files that it brings, in order."""
    match message:
        case Tokenize(request=request):
            return images_in(request)
        case Generate(images=images):
            return images
        case Chat(messages=messages):
            with_parts = (message for message in messages if isinstance(message.content, tuple))
            return tuple(image for message in with_parts for image in message.images)
        case _:
            return ()
