"""Islands of which one is killed every 20 s: Terrace's roster beside torchft's DiLoCo, on emulated links."""
