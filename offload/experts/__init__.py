"""A mixture's experts come one by one, once their router has spoken. This room knows no trees and no texts."""
