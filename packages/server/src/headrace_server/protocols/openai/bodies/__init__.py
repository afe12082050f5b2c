"""Request bodies (pydantic) and answer bodies (msgspec) of OpenAI's protocols."""
