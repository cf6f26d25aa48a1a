"""What speculation is worth on this machine: plain decoding and each policy, taking turns on one engine."""
