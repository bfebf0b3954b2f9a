"""What holds for the whole suite.

Property tests draw the same examples in every run, so that a change is judged by what it changes.
`pytest --hypothesis-profile=explore` draws new ones.
"""

from hypothesis import settings

settings.register_profile("fixed", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile("fixed")
