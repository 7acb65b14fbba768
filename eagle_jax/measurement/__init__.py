"""What decoding costs on a device: times of whole rounds and of their parts, against the bytes that they must read."""
