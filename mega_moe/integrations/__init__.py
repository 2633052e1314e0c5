"""The layer inside what others have built, one file each."""
