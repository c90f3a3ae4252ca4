"""The core: `Core.handle(event, now) -> commands`, without input or output."""
