"""The OpenAI-compatible HTTP server: content parts are segments, and answers tell what was reused.

One process serves one engine. ``app.create_app`` makes the application; ``hypic serve`` runs it.
"""
