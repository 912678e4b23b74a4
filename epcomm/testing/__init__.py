"""What tests of epcomm, and of code that uses it, are written with: ranks under a watchdog, and delays."""
