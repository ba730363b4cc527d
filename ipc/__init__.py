"""What crosses a process boundary: messages, sockets, addresses and the client."""
