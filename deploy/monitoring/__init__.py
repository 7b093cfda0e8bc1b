"""Prometheus' configuration, rules and alerts, and Grafana's dashboards as code."""
