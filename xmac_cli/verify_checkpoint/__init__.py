"""`xmac verify`: re-check hashes, format and attachments."""
