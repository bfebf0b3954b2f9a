"""The tensor axis at run time: splits unmodified single-device blocks over ranks."""
