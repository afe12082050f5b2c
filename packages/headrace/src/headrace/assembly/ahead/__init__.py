"""Work of a start before torch is imported: weights are read and packed, torch's library is linked."""
