"""Messages as bytes, and the sockets that carry them."""
