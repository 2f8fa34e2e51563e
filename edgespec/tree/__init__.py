"""Token trees and what is settled about them beforehand: shapes, settings, policies. Knows no model."""
