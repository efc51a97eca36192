"""Written by protoc from scheduler.proto (`make proto`); do not edit."""
