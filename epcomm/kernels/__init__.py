"""What runs on the device. ``protocol`` holds what both targets share: regions, words and the edges that waits close."""
