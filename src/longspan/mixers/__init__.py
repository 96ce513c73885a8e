"""3. Mixers: what lets tokens meet across ranks."""
