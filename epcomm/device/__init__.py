"""The device vocabulary: what a kernel may say, whatever it runs on.

==========================  ==============================================================================
``peer``                    base address of a peer's copy of the control segment
``copy``                    copy to or from a peer's memory; ``copy_streaming``: past the caches
``signal``                  raise a monotone 64-bit word, after all that this program wrote through caches
``signal_after_streaming``  the same, after streaming stores as well
``wait``                    until a word is ``>=`` a value: acquire, bounded by a deadline, abortable
``meet``                    the first wait on a peer in an operation: also compares what it is calling
``fence``                   order this program's earlier writes, streaming stores included
``start_put``               GPU, to ranks that load and store don't reach: start a copy between parts of a segment
``raise_remote``            there, raise a word after all that this program put to that rank
``quiet``                   until the sources of this program's puts may be overwritten
==========================  ==============================================================================

On CPUs a kernel takes ``(ctx, args, program, num_programs)``: the rank's context block and the operation's parameter
block (both addresses of 64-bit words, see `control` and ``kernels/protocol``), and which of the rank's programs it is.
It returns a status (`control.OK` or the reason it stopped).

On GPUs it takes ``(ctx, args, fingerprint, six call words)``, numbers its programs itself in the order in which they
start (``enter``), and leaves its status where the host looks (``leave``). Its phases follow one another in that order.

``device.cpu`` is the Numba target, ``device.gpu`` the Triton one; both have the same names for the same things.
"""
