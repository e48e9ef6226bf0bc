"""The reference trainer: real video files, a real diffusers transformer, any launcher."""
