"""Parts of towers for images, and of the decoders that read their states; :mod:`.towers` are whole ones."""
