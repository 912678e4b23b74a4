"""What runs on the device. ``protocol`` is what targets share: regions, words, and the edges that waits close."""
