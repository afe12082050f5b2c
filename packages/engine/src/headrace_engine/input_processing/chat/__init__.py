"""Chats to prompts: messages, roles and templates, rendered in a sandbox."""
