"""What Raddle is compared with, a file a family; a module is imported only where its family takes part."""
