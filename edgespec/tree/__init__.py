"""Token trees and what is settled about them beforehand: shapes, settings, policies. It knows no model."""
