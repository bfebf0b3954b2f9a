"""The context axis at run time: attention over tokens that are split over ranks."""
