"""Generation token by token: the states of mixers in buffers, which every token changes in place, and graphs of a whole step."""
