"""The emulation: the real scheduler, plugin and router on a device whose time is modelled."""
