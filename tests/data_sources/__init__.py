"""Input from other libraries' loaders; each file is left out where its library is missing."""
