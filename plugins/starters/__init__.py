"""What ``oarlock new-plugin`` begins a package with: one small plugin of each kind, whole and right. Nothing registers them here."""
