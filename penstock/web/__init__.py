"""The web page: chat, live view and administration. Plain ES modules and CSS in `static/`, served as they are."""
