"""Files that confined processes hand out."""

import json


def checked_files(data: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Files that a confined process reports, if the report is well formed; else nothing."""
    try:
        content = json.loads(data)
        files = {str(name): str(text) for name, text in content["files"].items()}
        refused = tuple(map(str, content["refused"]))
        json.dumps([files, refused], ensure_ascii=False).encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}, ()
    return files, refused
