"""One file per operation: where its regions lie, which words it raises, and which edge each wait closes."""
