"""The device vocabulary: what a kernel may say, whatever it runs on.

==================  ==============================================================================
``peer``            base address of a peer's copy of a symmetric segment
``put``             start a copy to a peer
``signal``          raise a monotone 64-bit word, after everything this program wrote before
``put_signal``      put, then a signal that no reader can see before the data
``wait``            until a word is ``>=`` a value: acquire, bounded by a deadline, abortable
``meet``            the first wait on a peer in an operation: also compares what it is calling
``fence``           order this program's earlier writes, streaming stores included
==================  ==============================================================================

A kernel takes ``(ctx, args, program, num_programs)``: the rank's context block and the operation's
parameter block (both addresses of 64-bit words, see `control` and ``kernels/protocol``), and which of
the rank's programs it is. It returns a status (`control.OK` or the reason it stopped).

``device.cpu`` is the Numba target.
"""
