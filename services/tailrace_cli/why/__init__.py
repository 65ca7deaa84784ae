"""Critical path of a run: `timeline` sorts its events, `path` follows them, `causes` names the settings
that move each part. Pure."""
