"""The tensor axis at run time: single-device blocks, cut over ranks from outside."""
