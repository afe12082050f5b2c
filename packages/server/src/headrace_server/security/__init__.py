"""Access control: keys, browsers, certificates, hardened settings."""
