"""Other libraries' functions and classes, computed by Raddle; a module each."""
